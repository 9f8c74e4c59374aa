"""Operations with several implementations: one folder per op."""
