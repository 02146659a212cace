"""Dense training, half width, FST, Activation24 and Venom side by side, their recipes and controls."""
