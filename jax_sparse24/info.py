"""`python -m jax_sparse24.info`: a self-check of the installation."""

import argparse

from jax_sparse24.installation import info

if __name__ == "__main__":
    text = "Prints versions, devices, and which implementations are on or off and why."
    argparse.ArgumentParser(prog="python -m jax_sparse24.info", description=text).parse_args()
    info()
