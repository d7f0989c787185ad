"""An agent for a worker: it answers with the model's first reply."""


async def my_agent(task, session):
    llm = session.openai()
    reply = await llm.chat.completions.create(model=session.model, messages=task.messages)
    return reply.choices[0].message.content
