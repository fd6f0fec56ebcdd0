"""The error of a checkpoint that is missing, corrupt, or of a kind jradix cannot run."""


class CheckpointError(ValueError):
    """Names the file, what was expected in it and what was found. The user's to fix: the engine is unharmed."""
