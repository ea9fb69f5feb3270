"""Any pair of modules: the pair as data, how its sides run, the criterion, sampling, pairing and localisation."""
