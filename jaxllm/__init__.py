"""Published methods for large language models as pure functions over one Flax decoder.

Importing this package imports neither JAX nor TensorFlow and touches no device; import the part
that you need, for example `from jaxllm.models import decoder`.
"""

__version__ = "0.1.0"
