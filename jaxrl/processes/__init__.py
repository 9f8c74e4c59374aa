"""Communication between the processes of one run, and HTTP."""
