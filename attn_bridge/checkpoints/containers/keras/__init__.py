"""Files of Keras: weights in HDF5 (``.weights.h5``, ``.h5``), alone, in shards, or in an archive (``.keras``)."""
