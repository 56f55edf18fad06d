// Tools, structured answers and logprobs, by the stock `openai` package and by the AI SDK.
import assert from "node:assert/strict";
import test from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, Output, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = process.env.DIPTYCH_URL;
const model = process.env.DIPTYCH_MODEL;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const ai = createOpenAICompatible({ name: "diptych", baseURL, supportsStructuredOutputs: true });

const question = "What is the weather in Paris?";
const messages = [{ role: "user", content: question }];
const Asked = z.object({ city: z.enum(["Paris", "Rome"]), day: z.enum(["today", "tomorrow"]) });
const Weather = z.object({ sky: z.enum(["sunny", "cloudy"]), warm: z.boolean() });
const parameters = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Paris", "Rome"] },
    day: { type: "string", enum: ["today", "tomorrow"] },
  },
  required: ["city", "day"],
  additionalProperties: false,
};
const told = { name: "get_weather", description: "Tells the weather of a city", parameters };

test("openai: a tool over chat, whole and streamed", async () => {
  const asked = {
    model,
    messages,
    temperature: 0,
    tools: [{ type: "function", function: { ...told, strict: true } }],
    tool_choice: "required",
  };
  const whole = await client.chat.completions.create(asked);
  const [call] = whole.choices[0].message.tool_calls;
  assert.equal(whole.choices[0].finish_reason, "tool_calls");
  Asked.parse(JSON.parse(call.function.arguments));
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  const [again] = streamed.choices[0].message.tool_calls;
  assert.equal(again.function.arguments, call.function.arguments);
});

test("openai: a tool over responses", async () => {
  const asked = {
    model,
    input: question,
    temperature: 0,
    tools: [{ type: "function", ...told, strict: true }],
    tool_choice: "required",
  };
  const first = await client.responses.stream(asked).finalResponse();
  const [call] = first.output;
  Asked.parse(JSON.parse(call.arguments));
  const second = await client.responses.create({
    model,
    previous_response_id: first.id,
    input: [{ type: "function_call_output", call_id: call.call_id, output: "sunny" }],
    temperature: 0,
    max_output_tokens: 24,
  });
  assert.ok(second.output_text);
});

test("openai: structured answers are parsed", async () => {
  const chat = await client.chat.completions.parse({
    model,
    messages,
    temperature: 0,
    response_format: zodResponseFormat(Weather, "weather"),
  });
  Weather.parse(chat.choices[0].message.parsed);
  const response = await client.responses.parse({
    model,
    input: question,
    temperature: 0,
    text: { format: zodTextFormat(Weather, "weather") },
  });
  Weather.parse(response.output_parsed);
});

test("openai: logprobs and several answers", async () => {
  const asked = { model, messages, temperature: 0, max_tokens: 4, n: 2 };
  const whole = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
  assert.equal(whole.choices.length, 2);
  for (const { logprobs, message } of whole.choices) {
    assert.equal(logprobs.content.map(({ token }) => token).join(""), message.content);
    assert.ok(logprobs.content.every(({ top_logprobs }) => top_logprobs.length === 2));
  }
});

const get_weather = tool({
  description: "Tells the weather of a city",
  inputSchema: Asked,
  execute: async ({ city }) => `sunny in ${city}`,
});

test("ai: generateText calls a tool and goes on", async () => {
  const { steps } = await generateText({
    model: ai(model),
    prompt: question,
    temperature: 0,
    maxOutputTokens: 64,
    tools: { get_weather },
    stopWhen: isStepCount(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  });
  assert.equal(steps.length, 2);
  assert.match(steps[0].toolResults[0].output, /^sunny in (Paris|Rome)$/);
  assert.ok(steps[1].text);
});

test("ai: streamText streams a call", async () => {
  const { fullStream } = streamText({
    model: ai(model),
    prompt: question,
    temperature: 0,
    tools: { get_weather },
    toolChoice: { type: "tool", toolName: "get_weather" },
    onError: ({ error }) => assert.fail(error),
  });
  const kinds = [];
  for await (const { type } of fullStream) kinds.push(type);
  for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result", "finish"])
    assert.ok(kinds.includes(kind), `${kind} in ${kinds}`);
});

test("ai: generateObject and structured text", async () => {
  const asked = { model: ai(model), prompt: question, temperature: 0 };
  const { object } = await generateObject({ ...asked, schema: Weather });
  Weather.parse(object);
  const { output } = await generateText({ ...asked, output: Output.object({ schema: Weather }) });
  Weather.parse(output);
});
