"""What each command of `nanollm` does, one a file: add_flags() says what it takes, run() does it and returns the exit
code."""
