"""A kernel of your own, judged from Python with the defaults of ``needlepoint verify``."""

from my_candidate import MyKernel

import needlepoint

result = needlepoint.check(MyKernel(), tokens=600)
assert result.verdict == "match", result.summary()
