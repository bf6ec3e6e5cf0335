"""`python -m treadle`."""

from treadle.cli import main

main()
