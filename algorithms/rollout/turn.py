"""From sampled tokens to what an environment and a chat template see of a turn."""

from algorithms.data.chat import ChatFormat
from algorithms.protocols import Completion
from environments import tool_calls
from environments.protocol import AssistantTurn, Message


def written_text(completion: Completion, chat: ChatFormat) -> str:
    """The text without the stop token. `stop_reason` decides, for stop tokens differ by model."""
    stopped = completion.stop_reason == "stop"
    return chat.text(completion.token_ids[:-1] if stopped else completion.token_ids)


def assistant_turn(completion: Completion, chat: ChatFormat, *, number: int) -> AssistantTurn:
    """What the environment is given. `number` makes the ids of calls differ between turns."""
    parsed = tool_calls.parse(written_text(completion, chat), id_prefix=f"call_{number}")
    return AssistantTurn(
        text=parsed.content,
        tool_calls=parsed.calls,
        tool_call_errors=parsed.errors,
        token_ids=completion.token_ids,
        log_probs=completion.log_probs,
        truncated=completion.stop_reason == "length",
    )


def assistant_message(turn: AssistantTurn, completion: Completion, chat: ChatFormat) -> Message:
    """The turn as a chat message. Calls that did not parse stay in the text, as they were written.

    The message is for templates and people; the tokens are never made from it again.
    """
    message: Message = {
        "role": "assistant",
        "content": written_text(completion, chat) if turn.tool_call_errors else turn.text,
    }
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in turn.tool_calls
        ]
    return message
