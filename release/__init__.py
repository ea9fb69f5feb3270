"""A release: what is built and checked before it is published.

python -m release                       build, check and write the bill of materials
python -m release --install 3.11 3.13   and install it in empty environments, each extra
python -m release bump 0.2.0            put a new version everywhere, and the changelog's section
"""
