"""``python -m flwr_kd.cli``."""

from flwr_kd.cli.app import main

if __name__ == "__main__":
    main()
