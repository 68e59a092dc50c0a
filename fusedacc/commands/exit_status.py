"""Exit statuses of the commands. 0: all is well."""

#: The command has found a problem: wrong results, a budget that was exceeded.
WRONG = 1
#: An argument or variable is wrong, or the command could not do its work.
MISUSED = 2
#: Interrupted by the user.
STOPPED = 130
