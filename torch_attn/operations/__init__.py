"""Operations that torch computes differently from this package's needs."""
