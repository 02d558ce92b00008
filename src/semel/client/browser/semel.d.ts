/** Types of semel.js. */

/** A write whose outcome is not known. */
export interface Pending {
  readonly key: string;
  readonly intent: string;
  readonly since: Date;
}

/**
 * Called before a new key is made while an earlier write of the same intent is in doubt: its content was changed, or its
 * key is too old. Return false to send nothing: the result is then "unsent".
 */
export type OnUnclear = (doubts: Pending[]) => boolean | void | Promise<boolean | void>;

export interface SemelOptions {
  /** Attempts of one send. Default: 8. */
  attempts?: number;
  /** Milliseconds of one send, with its pauses. Default: 90 000. */
  budget?: number;
  /** Milliseconds of one attempt. Default: 30 000. */
  timeout?: number;
  /** Milliseconds of the first pause, doubled for each further one, before the jitter. Default: 500. */
  firstPause?: number;
  /** Milliseconds of the longest pause, before the jitter. Default: 20 000. */
  longestPause?: number;
  /** Milliseconds that a key is used for. It must end before the server forgets the key. Default: 23 hours. */
  ttl?: number;
  onUnclear?: OnUnclear;
  /** Called once if keys cannot be in session storage and a reload will forget them. Default: console.warn. */
  onStorageFailure?: (error: unknown) => void;
  /** Default: sessionStorage. */
  storage?: Storage;
  /** Default: the browser's fetch. */
  fetch?: typeof fetch;
}

export interface SendInit extends RequestInit {
  /** What this write is for. Default: its method and URL. */
  intent?: string;
  onUnclear?: OnUnclear;
}

export interface Result {
  /** Null if nothing was sent. */
  readonly key: string | null;
  /** "unknown": the write may have happened. The key stays, and the next send of the same content uses it. */
  readonly outcome: "succeeded" | "rejected" | "unknown" | "unsent";
  /** Whether the server repeated a stored answer. */
  readonly replayed: boolean;
  readonly attempts: number;
  /** What the last attempt ended with, if it got no answer. */
  readonly error: unknown;
  /** The last answer. Its body has arrived already. */
  readonly response: Response | null;
}

export interface ProtectOptions {
  onAnswer?: (result: Result) => void;
  /** Makes the body. Default: as the form's enctype says. */
  body?: (data: FormData) => BodyInit;
  headers?: HeadersInit;
  /** Default: the form's id, method and action. */
  intent?: string;
  onUnclear?: OnUnclear;
}

export class Semel {
  constructor(options?: SemelOptions);
  /** Where keys are: "memory" means that a reload forgets them. */
  readonly storage: "session" | "memory";
  /** Send a write, and retry it with the same key until there is an answer or the budget is spent. */
  send(input: RequestInfo | URL, init?: SendInit): Promise<Result>;
  /** Send a form in this way when it is submitted. Returns a function that undoes this. */
  protect(form: HTMLFormElement, options?: ProtectOptions): () => void;
  /** The writes of this tab whose outcome is not known. */
  pending(): Pending[];
  /** Remove a key whose outcome the page has found out. */
  forget(key: string): void;
}

/** What an answer means: retry with the same key, or an outcome. */
export function judge(
  status: number,
  headers: Headers,
  body?: string,
  unclear?: boolean,
): { retry: boolean; outcome: "succeeded" | "rejected" | "unknown"; after: number };

/** The milliseconds of a Retry-After, or null. */
export function retryAfter(value: unknown, now?: number): number | null;

/** A short digest of some bytes, to compare contents. */
export function digest(bytes: Uint8Array): string;
