"""What can be wrong with a dump."""


class DumpError(RuntimeError):
    """A dump cannot be imported as asked; the message names file and line, what is there, and what to do."""
