"""The one exception for a mistake that the user can mend."""


class UserError(Exception):
    """The user's input is wrong.

    The message names the option, file, row or key, the value found and what to do about it. The command line prints it
    on standard error without a traceback and exits with status 2.
    """


class RunError(Exception):
    """The run cannot go on, and the input is not to blame.

    The message says what happened at which step and what was saved. The command line prints it and exits with status 1.
    """
