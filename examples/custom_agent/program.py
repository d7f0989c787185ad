"""An agent that does not import Tidegate: reads a problem from stdin and prints the answer."""

import ast
import json
import operator
import sys

from openai import OpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]


def evaluate(node):
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    return ast.literal_eval(node)


def calculator(arguments):
    try:
        expression = json.loads(arguments)["expression"]
        return f"{evaluate(ast.parse(expression, mode='eval').body):g}"
    except (ArithmeticError, KeyError, SyntaxError, TypeError, ValueError) as error:
        return f"error: {error}"


client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = [{"role": "user", "content": sys.stdin.read()}]
for _ in range(6):
    reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages, tools=TOOLS)
    message = reply.choices[0].message
    if not message.tool_calls:
        print(message.content)
        break
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        content = calculator(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
