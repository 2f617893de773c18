"""The entry that launch scripts expect: ``python train.py key=value ...`` is ``crossrl train key=value ...``."""

from crossrl.cli.main import main

if __name__ == "__main__":
    main(["train"])
