// The AI SDK with its adapter for servers like OpenAI's: it checks every chunk by schema.
import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, streamText } from "ai";

const provider = createOpenAICompatible({
  name: "diptych",
  baseURL: process.env.DIPTYCH_URL,
  includeUsage: true,
});
const model = provider(process.env.DIPTYCH_MODEL);
const asked = {
  model,
  instructions: "You are a helpful assistant.",
  prompt: "What is the capital of France?",
  temperature: 0,
};
const ANSWER = "The capital of France is Paris.";

test("generateText", async () => {
  const { text, finishReason, usage, warnings } = await generateText(asked);
  assert.equal(text, ANSWER);
  assert.equal(finishReason, "stop");
  assert.equal(usage.outputTokens, 7);
  assert.deepEqual(warnings ?? [], []);
});

test("streamText", async () => {
  const { fullStream, usage } = streamText({
    ...asked,
    onError: ({ error }) => assert.fail(error),
  });
  let said = "";
  let finish;
  for await (const part of fullStream) {
    if (part.type === "text-delta") said += part.text;
    if (part.type === "finish") finish = part.finishReason;
    assert.notEqual(part.type, "error");
  }
  assert.equal(said, ANSWER);
  assert.equal(finish, "stop");
  assert.equal((await usage).outputTokens, 7);
});

test("settings reach the model", async () => {
  const settings = { maxOutputTokens: 3, topP: 0.9, seed: 7, presencePenalty: 0.1 };
  const { finishReason, usage } = await generateText({ ...asked, ...settings });
  assert.equal(finishReason, "length");
  assert.equal(usage.outputTokens, 3);
});

test("an error is an error with its status", async () => {
  const nobody = { ...asked, model: provider("nobody"), maxRetries: 0 };
  await assert.rejects(
    generateText(nobody),
    (error) => APICallError.isInstance(error) && error.statusCode === 404,
  );
});
