"""What goes wrong in the host."""


class HostError(RuntimeError):
    """A run of verl cannot be recorded, replayed or exchanged as asked; the message says why and what to change."""
