"""The ways in which a run can be stopped, or a sample left out."""


class UsageError(Exception):
    """Wrong flags, data or checkpoint, found before training starts.

    The message is one line that names the file or flag and a value that would work. The scripts print it once, as
    `error: …`, and every rank exits with 2.
    """


class Unreadable(Exception):
    """One sample that cannot be used; the message is a short reason without the file's name.

    Training goes on: the sample gets weight 0, is named once and counted.
    """


class Elsewhere(Exception):
    """This rank has to stop, and another one has the cause and will say it."""
