"""Measurements, run as ``python -m needlepoint.benchmarks.NAME``; ``--help`` lists the options.

``byte_sweep``
    Bytes of the CUDA stores against the emulation, over millions of rows.
``diff_beside_sglang``
    Time and memory of ``needlepoint diff`` and of SGLang's dump comparator, in turn.
``diff_memory``
    Peak memory and time of ``needlepoint diff``.
``false_alarms``
    How often the judge flags a correct candidate.
``gpu_report``
    Bytes and times of all kernels on one card: ``make gpu-test``.
``html_report``
    Size of the HTML report of 43 layers, and how long a browser takes to open it.
``reference_memory``
    Peak memory and time of the reference on one long request, and how both grow.
``same_results``
    What differs between two results of one input, environment and times left out.

``needlepoint bench`` runs ``stores`` and, with ``--scores``, ``scores``. The rest are parts: their
workloads (``cases``), the engines beside them (``score_engines``), the clock (``timing``), and the
cases of ``false_alarms`` (``random_cases``).
"""
