"""attnlens looks at the attention of pretrained transformers as kernel machines."""

__version__ = "0.1.0"
