"""The reference: DeepSeek-V4's compressor and indexer in plain PyTorch.

Open ``model`` first: one layer from hidden states to attention output, in plain lines and exact
arithmetic. The other modules compute the same with every rounding point of a kernel, and in calls
of any size; a test compares them with ``model``. Read them in this order:

1. ``config``, ``weights``: shapes and tensors of a layer.
2. ``compressor``: a window of tokens becomes one row; ``norm``, ``rope`` and ``hadamard`` follow.
3. ``indexer``, ``topk``: a query scores the rows and picks the best.
4. ``attention``: the sparse attention that reads the picked rows.
5. ``layer``: all stages over the tokens of a request, in calls of any size. Its parts are
   ``projections``, ``keyside``, ``main_attention`` and ``request``; its result is in ``stages``.

``profile`` names every rounding point; ``rounding`` and ``formats`` round. The sums in ``linear``
and ``parallel`` do not depend on the number of tokens in a call. ``ring`` keeps state by absolute
position.
"""
