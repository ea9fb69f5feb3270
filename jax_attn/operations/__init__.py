"""Operations of decoding that XLA does slowly in bfloat16 on CPUs: elsewhere, and in exported programs, plain ones."""
