"""What runs which operation on which hardware, decided in one place: `decision.decide`.

Sizes of a product: it multiplies (M, K) by (K, N), whatever the axes that its operands contract."""
