"""An agent with two policies: a solver proposes four expressions, and a verifier chooses among them."""

import json

PROPOSALS = 4


def verifier_messages(question, expression):
    return [{"role": "user", "content": f"{question} Is it {expression}?"}]


async def agent(task, session):
    llm = session.openai()

    async def ask(policy, messages):
        reply = await llm.chat.completions.create(model=policy, messages=messages)
        return reply.choices[0].message.content

    question = task.messages[-1]["content"]
    proposals = [await ask("solver", task.messages) for _ in range(PROPOSALS)]
    verdicts = [await ask("verifier", verifier_messages(question, one)) for one in proposals]
    chosen = verdicts.index("yes") if "yes" in verdicts else 0
    return json.dumps({"chosen": chosen, "proposals": proposals, "verdicts": verdicts})
