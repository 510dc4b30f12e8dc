"""The reference: what DeepSeek-V4's compressor and indexer mean to compute, in plain PyTorch.

Open ``model`` first: one layer from hidden states to attention output, in plain lines and exact
arithmetic. The other modules are the same computation with every rounding point of a kernel, in
calls of any size; a test holds them to ``model``. Each is one idea:

1. ``config``, ``weights``: shapes and tensors of a layer.
2. ``compressor``: windows of tokens become one row; ``norm``, ``rope`` and ``hadamard`` finish it.
3. ``indexer``, ``topk``: a query scores the rows and picks some.
4. ``attention``: what the picks are for.
5. ``layer``: all of it over the tokens of a request, in calls of any size (``projections``,
   ``keyside``, ``main_attention`` and ``request`` are its parts, ``stages`` its result).

How numbers are kept: ``profile`` names every rounding point, ``rounding`` and ``formats`` round,
``linear`` and ``parallel`` make sums that do not depend on how much is computed together, and
``ring`` keeps state by absolute position.
"""
