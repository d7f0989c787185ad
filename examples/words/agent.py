"""The agent: plain code of the `openai` SDK, which knows nothing of training."""


async def agent(task, session):
    llm = session.openai()  # an AsyncOpenAI with this episode's base URL and key
    reply = await llm.chat.completions.create(model=session.model, messages=task.messages)
    return reply.choices[0].message.content
