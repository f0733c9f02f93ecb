"""Limits on the resources that one client can use on a server. `python -m tools.pages` generates
docs/reference/limits.md from this module.

Each constant is annotated with a `Limit`: the interface, the unit, the error that a request gets above the limit, and
the meaning. Limits that an operator configures, such as the length of the queue, are not listed here (see
docs/tenants.md). Does no I/O.
"""

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Limit:
    """Description of one limit, for the generated page docs/reference/limits.md."""

    door: str
    """Interface to which the limit applies, for example HTTP. Limits of one interface share a heading in
    docs/reference/limits.md."""
    unit: str
    error: str
    """Error that a request gets if it exceeds the limit."""
    meaning: str


_BAD = "INVALID_ARGUMENT, 400"
_BUSY = "RESOURCE_EXHAUSTED with a retry delay, 429"
_BOTH, _FORMS, _DELIVERY, _HTTP = "Requests, over gRPC and HTTP", "Structured output", "Delivery", "HTTP"

MAX_MESSAGE_BYTES: Annotated[int, Limit(_BOTH, "bytes", "INVALID_ARGUMENT", "Message of any gRPC call.")] = 16 * 2**20
MAX_PROMPT_BYTES: Annotated[
    int,
    Limit(_BOTH, "bytes", _BAD, "UTF-8 bytes of a prompt, of all messages of a chat, or of the tools of a chat."),
] = 8 * 2**20
MAX_READING_BYTES: Annotated[
    int,
    Limit(
        _BOTH, "bytes", _BUSY,
        "Requests that are being tokenized at a time: four of the longest prompts. Fewer where 160 times as many bytes "
        "are over a quarter of the memory that was free at the start.",
    ),
] = 32 * 2**20  # fmt: skip
MAX_REQUEST_ID_CHARS: Annotated[
    int, Limit(_BOTH, "characters", f"{_BAD}; an HTTP header that is longer is replaced", "Id of a request.")
] = 128
MAX_ROLE_CHARS: Annotated[int, Limit(_BOTH, "characters", _BAD, "Role of a chat message.")] = 64
MAX_CACHE_SALT_CHARS: Annotated[int, Limit(_BOTH, "characters", _BAD, "`cache_salt`.")] = 256
MAX_LOGPROBS: Annotated[int, Limit(_BOTH, "tokens", _BAD, "`logprobs` and `prompt_logprobs`.")] = 20
MAX_STOP_STRINGS: Annotated[int, Limit(_BOTH, "strings", _BAD, "`stop`.")] = 16
MAX_STOP_CHARS: Annotated[
    int, Limit(_BOTH, "characters", _BAD, "One stop string. Text that may become a stop string is held back.")
] = 1024
MAX_STOP_TOKEN_IDS: Annotated[int, Limit(_BOTH, "token ids", _BAD, "`stop_token_ids`.")] = 1024
MAX_LOGIT_BIASES: Annotated[int, Limit(_BOTH, "entries", _BAD, "`logit_bias`.")] = 1024
MAX_CHOICES: Annotated[int, Limit(_BOTH, "choices", _BAD, "`n`; also at most the slots of a group.")] = 64
MAX_DRAFTS: Annotated[int, Limit(_BOTH, "drafts", _BAD, "`num_drafts`: drafts of a choice that a step verifies.")] = 8
MAX_PENDING_CALLS: Annotated[
    int, Limit(_BOTH, "calls", "RESOURCE_EXHAUSTED", "gRPC calls that wait until a process accepts them.")
] = 16_384
MAX_PENDING_S: Annotated[
    int, Limit(_BOTH, "s", "CANCELLED", "Time that a gRPC call waits until a process accepts it.")
] = 3600
MAX_CRASHES: Annotated[
    int,
    Limit(_BOTH, "workers", "INTERNAL, 500; it is not retried", "Workers that crash while they compute one request."),
] = 2
CRASHES_KEPT_S: Annotated[
    float, Limit(_BOTH, "s", "none: the request is served again", "Time for which a crash of a worker is remembered.")
] = 3600.0
MAX_ENDED_WORKERS: Annotated[
    int, Limit(_BOTH, "workers", "none: the oldest are forgotten", "Workers that ended, and are remembered.")
] = 64

MAX_FORM_BYTES: Annotated[
    int, Limit(_FORMS, "bytes", _BAD, "Schema, regular expression or grammar, or all choices together.")
] = 256 * 1024
MAX_FORM_CHOICES: Annotated[int, Limit(_FORMS, "texts", _BAD, "Choices, of which the output is one.")] = 1024
MAX_RULES: Annotated[int, Limit(_FORMS, "rules", _BAD, "Rules and terminals of a grammar.")] = 1000
MAX_REFERENCES: Annotated[
    int, Limit(_FORMS, "references", _BAD, "References of a JSON schema that lead from one to the next.")
] = 500
MAX_MULTIPLE: Annotated[
    int,
    Limit(
        _FORMS,
        "",
        _BAD,
        "`multipleOf` of a JSON schema: numbers are followed digit by digit, one state for each of its values.",
    ),
] = 10_000
FORM_CPU_S: Annotated[float, Limit(_FORMS, "s", _BAD, "Processor time of compiling one form.")] = 2.0
FORM_MEMORY_BYTES: Annotated[int, Limit(_FORMS, "bytes", _BAD, "Memory of compiling one form.")] = 256 * 2**20
FORM_STACK_BYTES: Annotated[int, Limit(_FORMS, "bytes", _BAD, "Stack of compiling one form.")] = 64 * 2**20
MAX_PROOFS: Annotated[
    int, Limit(_FORMS, "forms", _BUSY, "Different forms that are compiled or wait for it; one of each tenant.")
] = 64
MAX_CHILDREN: Annotated[
    int, Limit(_FORMS, "processes", "none: forms wait", "Child processes of a server that compile forms.")
] = 2
MAX_PROVEN_BYTES: Annotated[
    int, Limit(_FORMS, "bytes", "none: the oldest are compiled again", "Texts of forms whose results a server keeps.")
] = 32 * 2**20
MAX_COMPILED_BYTES: Annotated[
    int, Limit(_FORMS, "bytes", "none: the oldest are compiled again", "Compiled forms that a process keeps.")
] = 64 * 2**20

MAX_UNDELIVERED_BYTES: Annotated[
    int,
    Limit(
        _DELIVERY, "bytes", "RESOURCE_EXHAUSTED; the stream can be resumed",
        "Events of all streams that clients have not taken: some 150,000 tokens without logprobs. The tenant with most "
        "bytes for its weight gives up the stream that was read least recently.",
    ),
] = 64 * 2**20  # fmt: skip
STALLED_S: Annotated[
    float,
    Limit(_DELIVERY, "s", "RESOURCE_EXHAUSTED; the stream can be resumed", "Time that a client has to take a message."),
] = 60.0
DELIVERY_GRACE_S: Annotated[
    float, Limit(_DELIVERY, "s", "DEADLINE_EXCEEDED", "Time past the deadline for taking the last messages.")
] = 1.0

MAX_CONNECTIONS: Annotated[int, Limit(_HTTP, "connections", "503", "Open connections.")] = 4096
MAX_HEADER_BYTES: Annotated[int, Limit(_HTTP, "bytes", "431", "Line and headers of a request.")] = 16 * 1024
MAX_CALLER_BYTES: Annotated[
    int,
    Limit(
        _HTTP, "bytes", "431",
        "Headers `authorization` and `baton-tenant`. With what gRPC adds they stay below the 8 KiB above which gRPC "
        "refuses calls at random.",
    ),
] = 6 * 1024  # fmt: skip
HEADERS_S: Annotated[float, Limit(_HTTP, "s", "closed", "Time to the end of the headers.")] = 10.0
BODY_S: Annotated[
    float, Limit(_HTTP, "s", "closed", "Time in which something of a body must come, or its rest after the answer.")
] = 30.0
BODY_BYTES_PER_S: Annotated[
    int, Limit(_HTTP, "bytes per s", "408", "Lowest rate of a body that takes longer than `BODY_S`.")
] = 64 * 2**10
WRITE_S: Annotated[float, Limit(_HTTP, "s", "closed", "Time in which some of an answer must be taken.")] = 60.0
MAX_BODY_BYTES: Annotated[int, Limit(_HTTP, "bytes", "413", "Body of a request.")] = MAX_MESSAGE_BYTES
MAX_BODIES_BYTES: Annotated[
    int,
    Limit(
        _HTTP, "bytes", "429",
        "Bodies of all requests that are being received or parsed. The one that has been arriving for the longest time "
        "is refused. The conversations and repeated fields of running requests to /v1/responses have the same limit.",
    ),
] = 256 * 2**20  # fmt: skip
MAX_ADDRESS_BODIES_BYTES: Annotated[
    int, Limit(_HTTP, "bytes", "429", "The same of the requests from one address: a quarter of those of all.")
] = MAX_BODIES_BYTES // 4
MAX_VALUES: Annotated[int, Limit(_HTTP, "values", "413", "Values of a body: as many as it has commas.")] = 2**19
MAX_TEXTS: Annotated[int, Limit(_HTTP, "texts", "413", "Texts of a body, keys of objects included.")] = 2**17
MAX_OBJECTS: Annotated[int, Limit(_HTTP, "objects", "413", "Lists and objects of a body.")] = 2**14
MAX_NESTING: Annotated[
    int, Limit(_HTTP, "levels", "400", "Lists and objects within each other in a body, or in the arguments of a call.")
] = 128
MAX_PROMPTS: Annotated[int, Limit(_HTTP, "prompts", "400", "Prompts of a completion.")] = 64
MAX_MESSAGES: Annotated[int, Limit(_HTTP, "messages", "400", "Messages of a chat.")] = 4096
MAX_PARTS: Annotated[int, Limit(_HTTP, "parts", "400", "Parts of a message's content.")] = 1024
MAX_FUNCTION_NAME_CHARS: Annotated[int, Limit(_HTTP, "characters", "400", "Name of a function.")] = 64
MAX_TRACE_CHARS: Annotated[
    int, Limit(_HTTP, "characters", "none: the header is dropped", "A header of W3C's Trace Context.")
] = 512
MAX_TOOLS: Annotated[int, Limit(_HTTP, "tools", "400", "Tools of a request, and calls of a message.")] = 128
MAX_TEMPLATE_VALUES: Annotated[
    int,
    Limit(
        _HTTP, "values", "400",
        "Values that a chat template gets as its messages, as its tools, and as `chat_template_kwargs`, each with the "
        "values within them.",
    ),
] = 2**15  # fmt: skip
MAX_ITEMS: Annotated[
    int, Limit(_HTTP, "items", "400", "Items of a conversation of /v1/responses, those of earlier responses included.")
] = 1024
MAX_INCLUDED: Annotated[int, Limit(_HTTP, "entries", "400", "`include` of /v1/responses.")] = 16
MAX_REPEATED_BYTES: Annotated[
    int, Limit(_HTTP, "bytes", "400", "Fields of /v1/responses that a response repeats, as JSON.")
] = 2 * 2**20
MAX_METADATA: Annotated[int, Limit(_HTTP, "entries", "400", "`metadata` of /v1/responses.")] = 64
MAX_PENDING_EVENTS: Annotated[
    int, Limit(_HTTP, "events", "none: the server holds back", "Events of a body's prompts that wait for its reader.")
] = 64
