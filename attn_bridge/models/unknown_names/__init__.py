"""Names that fit no layout: prefixes of trainers and wrappers, or several models in one tree; and advice about them."""
