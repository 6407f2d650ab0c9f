/** Conditions of the server, over one websocket; and a subscription that the server could not serve is made again. */
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { StreamSocket } from "../src/socket";
import type { ServerMessage } from "../src/types";

class FakeSocket {
  static readonly OPEN = 1;
  static made: FakeSocket[] = [];
  readyState = FakeSocket.OPEN;
  sent: Record<string, unknown>[] = [];
  onopen: () => void = () => undefined;
  onclose: () => void = () => undefined;
  onmessage: (event: { data: string }) => void = () => undefined;
  constructor() {
    FakeSocket.made.push(this);
  }
  send(text: string): void {
    this.sent.push(JSON.parse(text));
  }
  close(): void {}
  say(message: Record<string, unknown>): void {
    this.onmessage({ data: JSON.stringify(message) });
  }
}

beforeEach(() => {
  vi.useFakeTimers();
  FakeSocket.made = [];
  vi.stubGlobal("WebSocket", FakeSocket);
  vi.stubGlobal("location", { protocol: "http:", host: "127.0.0.1" });
});
afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

function connected(): [StreamSocket, FakeSocket, ServerMessage[], () => void] {
  const stream = new StreamSocket();
  const heard: ServerMessage[] = [];
  const leave = stream.subscribe({ request: () => ({ topic: "jobs" }), onMessage: (message) => heard.push(message) });
  const socket = FakeSocket.made.at(-1);
  if (socket === undefined) throw new Error("no connection was made");
  socket.onopen();
  return [stream, socket, heard, leave];
}
const asked = { type: "subscribe", id: 1, topic: "jobs" };
const refused = { type: "unavailable", id: 1, detail: "the database cannot be used now" };

test("a subscription that the server could not serve is made again later", () => {
  const [, socket, heard] = connected();
  expect(socket.sent).toEqual([asked]);
  socket.say(refused);
  expect(socket.sent).toEqual([asked]);
  vi.advanceTimersByTime(5000);
  expect(socket.sent).toEqual([asked, asked]);
  expect(heard).toEqual([]);
});

test("one that has ended meanwhile is not made again", () => {
  const [, socket, , leave] = connected();
  socket.say(refused);
  leave();
  vi.advanceTimersByTime(5000);
  expect(socket.sent).toEqual([asked, { type: "unsubscribe", id: 1 }]);
});

test("after a reconnect it is made once", () => {
  const [stream, first] = connected();
  first.say(refused);
  first.onclose();
  stream.retryNow();
  FakeSocket.made.at(-1)?.onopen();
  vi.advanceTimersByTime(5000);
  expect(FakeSocket.made.at(-1)?.sent).toEqual([asked]);
});
