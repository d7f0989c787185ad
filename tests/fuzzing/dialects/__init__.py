"""Valid requests in each dialect, and how a client reads the replies."""

from tests.fuzzing.dialects.base import Dialect
from tests.fuzzing.dialects.chat import Chat
from tests.fuzzing.dialects.completions import Completions
from tests.fuzzing.dialects.messages import Messages
from tests.fuzzing.dialects.responses import Responses

DIALECTS: dict[str, Dialect] = {one.name: one for one in (Chat(), Completions(), Messages(), Responses())}
