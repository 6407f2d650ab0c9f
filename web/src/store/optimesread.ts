/** Times of operators read from the server: one job after the other, and none shown for jobs that are no longer wanted. */
import { ApiError } from "../api";
import type { OperatorTimes } from "../types";

type Answer = OperatorTimes | ApiError;

/** Which jobs were asked for, and what each answered, in the same order. */
export interface TimesRead {
  readonly ids: readonly string[];
  readonly answers: readonly Answer[];
}

/** Null if `signal` ended it: no further job is asked for then. A refusal of one job leaves the others. */
export async function readTimes(
  ids: readonly string[],
  read: (jobId: string) => Promise<OperatorTimes>,
  signal: AbortSignal,
): Promise<TimesRead | null> {
  const answers: Answer[] = [];
  for (const id of ids) {
    if (signal.aborted) return null;
    answers.push(await read(id).catch(refusal));
  }
  return signal.aborted ? null : { ids, answers };
}

/** Only the API's errors are answers; any other is a fault of the page. */
function refusal(error: unknown): ApiError {
  if (error instanceof ApiError) return error;
  throw error;
}

export interface Answered {
  readonly jobs: readonly { readonly id: string; readonly times: OperatorTimes }[];
  readonly refused: readonly { readonly id: string; readonly error: ApiError }[];
}

/** The answers for exactly these jobs; null if what was read is of others, or nothing was. */
export function answeredFor(read: TimesRead | null, ids: readonly string[]): Answered | null {
  if (read === null || read.ids.join() !== ids.join()) return null;
  const each = read.ids.flatMap((id, index) => {
    const answer = read.answers[index];
    return answer === undefined ? [] : [{ id, answer }];
  });
  return {
    jobs: each.flatMap(({ id, answer }) => (answer instanceof ApiError ? [] : [{ id, times: answer }])),
    refused: each.flatMap(({ id, answer }) => (answer instanceof ApiError ? [{ id, error: answer }] : [])),
  };
}
