/**
 * The dashboard's one websocket: reconnects with back-off, resubscribes, and routes what arrives.
 *
 * A subscription asks for its request anew at every connect, so that it resumes where it stands (log offsets).
 * Text messages go to the subscription that they name; binary telemetry frames carry no subscription and go to
 * every one that takes frames. Decoding is two views of each frame, cheap enough for the main thread.
 */
import { signal } from "@preact/signals";
import { decodeFrame, type Frame, FrameError } from "./codec";
import type { ServerMessage } from "./types";

export type LinkState = "connecting" | "open" | "waiting" | "closed";

export interface Subscription {
  /** The request without type and id; called at each (re)connect. */
  readonly request: () => Readonly<Record<string, unknown>>;
  readonly onMessage: (message: ServerMessage) => void;
  readonly onFrame?: (frame: Frame) => void;
}

/** After which a subscription is made again for which the server could not read its database. */
const RESUBSCRIBE_MS = 2000;
const BACKOFF_MS = [250, 500, 1000, 2000, 4000, 8000] as const;

export class StreamSocket {
  readonly state = signal<LinkState>("closed");
  /** Frames that were refused as malformed since the page was opened. */
  readonly badFrames = signal(0);
  /** When the server was heard last, in Unix milliseconds; set when the connection is lost, null while there is one. */
  readonly lostAt = signal<number | null>(null);
  #heardAt = 0;
  /** Called when a connection fails before it ever opened: the session may have ended. */
  onRefused: () => void = () => undefined;

  #socket: WebSocket | null = null;
  #subscriptions = new Map<number, Subscription>();
  #nextId = 1;
  #attempt = 0;
  #retry: ReturnType<typeof setTimeout> | undefined;

  subscribe(subscription: Subscription): () => void {
    const id = this.#nextId++;
    this.#subscriptions.set(id, subscription);
    if (this.state.value === "closed") this.#connect();
    else if (this.state.value === "open") this.#send({ type: "subscribe", id, ...subscription.request() });
    return () => {
      this.#subscriptions.delete(id);
      if (this.state.value === "open") this.#send({ type: "unsubscribe", id });
    };
  }

  /** Connect at once, without waiting for the back-off. */
  retryNow(): void {
    if (this.state.value !== "waiting") return;
    clearTimeout(this.#retry);
    this.#connect();
  }

  close(): void {
    clearTimeout(this.#retry);
    this.state.value = "closed";
    this.#socket?.close(1000);
    this.#socket = null;
  }

  #connect(): void {
    this.state.value = "connecting";
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}/api/v1/stream`);
    socket.binaryType = "arraybuffer";
    let opened = false;
    socket.onopen = () => {
      opened = true;
      this.lostAt.value = null;
      this.#attempt = 0;
      this.state.value = "open";
      for (const [id, subscription] of this.#subscriptions) {
        this.#send({ type: "subscribe", id, ...subscription.request() });
      }
    };
    socket.onmessage = (event: MessageEvent<string | ArrayBuffer>) => this.#receive(event.data);
    socket.onclose = () => {
      if (this.#socket !== socket) return;
      if (!opened) this.onRefused();
      this.#reconnectLater();
    };
    this.#socket = socket;
  }

  #reconnectLater(): void {
    this.#socket = null;
    if (this.state.value === "closed") return;
    if (this.#heardAt > 0) this.lostAt.value ??= this.#heardAt;
    this.state.value = "waiting";
    const base = BACKOFF_MS[Math.min(this.#attempt, BACKOFF_MS.length - 1)] ?? 8000;
    this.#attempt += 1;
    this.#retry = setTimeout(() => this.#connect(), base * (0.75 + Math.random() / 2));
  }

  #receive(data: string | ArrayBuffer): void {
    this.#heardAt = Date.now();
    if (typeof data === "string") {
      const message = JSON.parse(data) as ServerMessage;
      if (message.type === "unavailable") this.#resubscribeLater(message.id);
      else this.#subscriptions.get(message.id)?.onMessage(message);
      return;
    }
    let frame: Frame;
    try {
      frame = decodeFrame(data);
    } catch (error) {
      if (!(error instanceof FrameError)) throw error;
      this.badFrames.value += 1;
      return;
    }
    for (const subscription of this.#subscriptions.values()) subscription.onFrame?.(frame);
  }

  #resubscribeLater(id: number): void {
    const socket = this.#socket;
    setTimeout(() => {
      const subscription = this.#subscriptions.get(id);
      // A connection made since has subscribed to everything.
      if (subscription === undefined || this.#socket !== socket) return;
      this.#send({ type: "subscribe", id, ...subscription.request() });
    }, RESUBSCRIBE_MS);
  }

  #send(message: Readonly<Record<string, unknown>>): void {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }
}

export const stream = new StreamSocket();
