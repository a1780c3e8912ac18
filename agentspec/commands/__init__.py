"""The commands of ``agentspec``: each module declares its arguments (``add``) and carries them out (``run``).

A command prints to stdout and returns its exit status: 0 where all is well, 1 where what it looked at is not, and 2
where it could not look. ``cli`` turns the errors that a command raises into a line on stderr and status 2.
"""
