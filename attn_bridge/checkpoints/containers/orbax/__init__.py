"""Folders of Orbax, with and without OCDBT, read and written as Zarr arrays."""
