"""The sources of verl that the host was written for; printed by ``crossrl patches fingerprint TARGET``.

``FINGERPRINTS``: of each function that is patched. ``CONTRACT``: of functions that are left alone but on whose way of
working the host relies (the first part of their fingerprint); compared before a run starts.
"""

from collections.abc import Mapping

RAY_TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
V1_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"

FINGERPRINTS: Mapping[str, Mapping[str, str]] = {
    f"{RAY_TRAINER}.init_workers": {
        "0.9.1": (
            "db45bdad0969601419a15d41f63bedaa:e61e721a30154cf1adaa3681a16d3eda0a666220435d59a082f6e2b01447e3d"
            "1f0dc3e34d9a2754d5a082ea33af3423701e6427f3170a9a4ad44fe9f7a2c176706f6d3e4ecbe6a774831f69d2e320eb"
            "c9f1d2969fd1fb7cda81f88d379875f74d76d6d246f4d5272c589748c387000b39a42adc769e04ed120873166b859c91"
            "5e3a8e"
        ),
        "0.8.0": (
            "e86752d72a7a02c563cf1d29cc95c668:e61e721a30154cf1adaa3681a16d3eda0a666220435d59a082f6e2eac1f0dc3"
            "e34d9a2754d5a082ea33af3423701e6427f3170a9a4ad44fe9f7a2c176706f6d3e4ecbe6a774831f69d2e320ebc9f1d2"
            "969fd1fb7cda81f88d379875f74d76d6d246f4d5272c589748c387000b39a42adc769e04ed120873166b859c91bd1a8e"
        ),
        "0.7.1": (
            "3ba18340a09fabb3d861bcbdddedda61:e61e721a30154cf1ad92d681a16d3eda0a6662263fdbc28658d038ec5fd26c3"
            "7821f0dc3e34d9a2754d5a082ea33af3423701e6427f3170a9a4ad44fe9f7a2c176706f6d3e4ec63f14dd25f7d7cd300"
            "766e320ebc9f1d2969fd1fb7cda81f88d379875f74d76387000b39a42adce04361208f5ea8e"
        ),
    },
    f"{RAY_TRAINER}.fit": {
        "0.9.1": (
            "e747aa11777826d981aeb9d4df659db0:e182832a9a08e7f6d8f25a14cbff9062da6183cb0baac53cdc2fdce80f9f21b"
            "c7fe3d48143f6f0f7accbb616fe5bd7a323032f1eddb961d6fc29439f499b80a4e4dc3c407d4e92d2bef7408a1e2cb48"
            "e7790dff539ae772b508f7fbf3fa8f9e0786fc22bd03c22237c31151c348e86e3a48567cf1ccf69b9a9ec90a253524dc"
            "6aaf64649aec13e890ffe840407dc4c4085d46e4d96d82e7f581d4a5fefbee8f03161419f3e0c8dcb54d0876ea32fb50"
            "bf1cfc0605b136b39289b7e191a51450ff533cf1ee090d4e2cac0ad4de60cfcaa99608d404626517b6332c301913a361"
            "86c9630610f1328f1ca35bebba86a546f6c409e0bd09794ece5f2d2b7e8217902ed5cb6426e881173a8b498064fbcd6a"
            "eabb20bd72a41b04b36555fd1b337e596a1f0bcd2a36a453cf88efff80531d6948c6847d"
        ),
        "0.8.0": (
            "e6c404da22e08a742f5d6b03b7416d65:e182832a9a08e7f6d8f25a14cbff90a6183cb0baac53cdc2fdce80b0a3de195"
            "f9f21bc7fe3d43f6f0f7accbb616fe5bd7a323032f1eddb961d6fc29439f499b80a4e4dc3c407d4e92d2bef7408a1e2c"
            "b48e7790dff539ae772b508f7fbf3fa8f9e0786fc22bd03c22237c31151c348e86e3a48567cf1ccf69b9a9ec90a25352"
            "4dc6aaf64649aec13e890ffe840407dc4c4085d46e4d96d82e7f581d4a5fefbee8f03161419f3e0c8dcb54d0876ea32f"
            "b50bf1cfc0605b136b39289b7e191a51450ff533cf1ee090d4e2cac0ad4de60cfcaa99608d404626517b6332c301913a"
            "36186c9630610f1328f1ca35bebba86a546f6c409e0bd09794ece5f2dfc902ed5cb6426e881173a8b498064fbcd6aeab"
            "b20bd72a41b04b36555fd1b337e596a1f0bc36a453cf88efff80531d6948c6847d"
        ),
        "0.7.1": (
            "882c562195c9622d87cb92d1066680ff:e18a08e7f6d8f25a14cbff90a6183cb0baac53cdc2e8080c3de195f9f21bc7f"
            "e3d43f6f0f7accbb616fe5bd7a323032f1eddb961d6fc29439f0908a1e2cb48e77cbbc3839ae774464e69577866b7983"
            "7c286c4c4a1ba1b86c5e38110bbf6949edc1f3f36c8f8988c3a3cfa4048567cf1ccf69b9a9ec90a253524dc6aaf64649"
            "aec13e890ffe840407dc4c4085d46e4d96d82e7f581d4a5fefbee8f03161419f3e0c8dcb54d0876ea32fb50bf1cfc060"
            "5b136b39289b7e191a51450ff533cf1ee090d4e2cac0ad4de60cfcaa99608d40460ff15f2c3b881bb36186c963061cdc"
            "328776f4dbebba86a546f6c409e0bd09794ece5f2dfc902ed5cb6426e881173a8b498064fbcd6aeabb20bd72a41b04b3"
            "6555fd1b3904355596a1f0bc468c9e36a453cf8ff80531d6948c68"
        ),
    },
    f"{RAY_TRAINER}._update_actor": {
        "0.9.1": (
            "69a69aa77e17b05ec0aca12477913343:b8c7b8d9a8c069f87a741662e86ede396e2f59dcec601adeadaccd1f71f4540e5fe18459"
        ),
        "0.8.0": ("bac3982214260d8bb5defae64bd011bb:b8c7b8d9a8c069f87a74166259dcec601adeada8d91f71f4540e5fe18459"),
        "0.7.1": ("074fde354f3c7fd2e278b4c5afa8baf6:b8c7b8d9a8c075e8ae23dd5fc980973de70a2e2e453a87137701bf752ee9459"),
    },
    f"{V1_TRAINER}.init": {
        "0.9.1": ("31473b4f913b7eb6f25b65028f7c97a6:cf107efb1"),
    },
    f"{V1_TRAINER}.fit": {
        "0.9.1": (
            "8f4bc1b7ccdf62205fd927e5fa5d42a4:41f5f962db698bdd7ba6117f83cfe1b0baacb67dc2fdce80082f9f21b4810e9"
            "efe1d8944841c7f93ea9f7c3570c2ef39358cb9a5eadd221a8fa263150c7f2bb025782aec4f631a48f7d29c65a1f388a"
            "46e58c7bc4c54dff974cb4ab76ffdcad8173e8088d47d"
        ),
    },
    f"{V1_TRAINER}._update_actor": {
        "0.9.1": ("9f65d17047bf499f692c06009d7e88eb:bbd59dcec741662e86ede396e2f5e4f2c7716d2384e842c479b"),
    },
}

CONTRACT: Mapping[str, Mapping[str, str]] = {
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._postprocess": {
        "0.9.1": "b4390425e729779edc0ba3eb12b7128b",
        "0.8.0": "b4390425e729779edc0ba3eb12b7128b",
        "0.7.1": "2e0cc178d7df84ec7d285655b67e4dda",
    },
    f"{RAY_TRAINER}._get_gen_batch": {
        "0.9.1": "ba159594c6982deb0de42703cca26789",
        "0.8.0": "ba159594c6982deb0de42703cca26789",
        "0.7.1": "ba159594c6982deb0de42703cca26789",
    },
    f"{V1_TRAINER}._step_once": {
        "0.9.1": "12f6d7cf396f578a2db98e1334f4ee49",
    },
    f"{V1_TRAINER}._submit_batch_to_rollout": {
        "0.9.1": "99e05536a0ff82ac53fcf4e6f77d7490",
    },
    f"{V1_TRAINER}._compute_advantage": {
        "0.9.1": "9d2131667c75adae40745ece4dd913fa",
    },
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.sample": {
        "0.9.1": "b4ac0c97bfb72ad4384096cc704c0640",
    },
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._agent_loop_postprocess": {
        "0.9.1": "ac0009c8f02d0294650e9cba21bacd92",
    },
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ._run_prompt": {
        "0.9.1": "21c967971ee2ab9012273b5c89e1c8b8",
    },
}
