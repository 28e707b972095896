"""`python -m kvtiers.cli`: the same as `kvtiers`."""

from kvtiers.cli import main

main()
