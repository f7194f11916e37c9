"""`python -m bayesformer`."""

from bayesformer.cli import entry

if __name__ == "__main__":
    entry()
