"""The tests of test_store.py, over a line that loses the answer to every call once."""

from .lossy import lossy_remote, lossy_repeated, lossy_service, real_service_of_the_session  # noqa: F401
from .test_store import *  # noqa: F403

# The line's own descriptors, in this process, come and go; and calls that are repeated are more than one.
del test_no_descriptor_and_no_mapping_is_left, test_on_the_services_host_no_bytes_go_over_the_connection, test_a_download_is_of_parallel_ranges_into_one_buffer  # noqa: F821
