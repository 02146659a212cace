"""Running ablations: `python -m experiments.ablate CONFIG`."""
