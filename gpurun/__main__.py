"""`python -m gpurun`, for where the command is not on the path."""

from gpurun.cli.app import main

if __name__ == "__main__":
    main()
