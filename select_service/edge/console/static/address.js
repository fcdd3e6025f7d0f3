// The address after `#`: view/argument?filter=value. What a view is narrowed to stands there, so that
// a link shows the same again.

export function read(hash) {
  const at = hash.indexOf("?");
  const [name, ...rest] = (at < 0 ? hash : hash.slice(0, at)).split("/");
  let argument = null;
  try {
    argument = rest.length ? decodeURIComponent(rest.join("/")) : null;
  } catch {
    argument = null;
  }
  return { name, argument, filters: new URLSearchParams(at < 0 ? "" : hash.slice(at + 1)) };
}

export function written({ name, argument, filters }) {
  const path = argument === null ? name : `${name}/${encodeURIComponent(argument)}`;
  const query = String(filters ?? "");
  return query ? `${path}?${query}` : path;
}

// An empty filter has no place in the address.
export function setFilter(filters, name, value) {
  if (value) filters.set(name, value);
  else filters.delete(name);
}
