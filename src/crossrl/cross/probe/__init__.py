"""The first module whose output differs: one recorded sample through two sides, module by module (``crossrl probe``).

``side.py`` runs a side and writes a dump, ``compare.py`` compares two dumps; the sides may be other interpreters or
machines. ``hooks.py`` listens to the modules, ``sketch.py`` says what is kept of an output, ``dump.py`` is the format.

Why not ``mindstudio-probe`` (looked at: 26.2.0, MulanPSL-2.0). It imports and dumps on CPU without an NPU. But what
is asked here is whether a token that was decoded step by step, 16 rows at a time, went through the same computation
as in a packed row with other filler, and it compares tensors call by call as they are: such calls do not line up.
Starting it replaces ``forward`` of each module and hooks in PyTorch for good (level mix: about 500 methods of
``torch.Tensor``), its tensors are pickles, and it needs pandas, TensorBoard, skl2onnx and ten more.
"""
