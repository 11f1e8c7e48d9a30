"""The tests of test_queue.py, over a line that loses the answer to every call once."""

from .lossy import lossy_remote, lossy_repeated, lossy_service, real_service_of_the_session  # noqa: F401
from .test_queue import *  # noqa: F403
