/** Which refusals of the server pass by themselves, so that asking again may help. */
import type { ApiError } from "../api";

/** All others stay until someone has done what they say. */
const PASSING = new Set(["too_many_stacks", "agent_silent", "connection_lost", "node_unreachable"]);

/** Also true where the server itself gave no answer, or failed. */
export const isPassing = (error: ApiError): boolean =>
  error.status === 0 || error.status >= 500 || PASSING.has(error.code ?? "");
