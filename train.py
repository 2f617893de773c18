"""The entry that launch scripts expect: ``python train.py key=value ...`` is ``crossrl train key=value ...``."""

import sys

from crossrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
