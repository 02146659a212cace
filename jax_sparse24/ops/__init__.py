"""Operations on sparse arrays: each validates, chooses an implementation and calls it."""
