"""`python -m jax_sparse24.info`: a self-check of the installation."""

from jax_sparse24.installation import info

if __name__ == "__main__":
    info()
