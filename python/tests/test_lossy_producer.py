"""The tests of test_producer.py, over a line that loses the answer to every call once."""

from .lossy import lossy_remote, lossy_repeated, lossy_service, real_service_of_the_session  # noqa: F401
from .test_producer import *  # noqa: F403
