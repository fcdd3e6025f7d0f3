// Shows /openapi.json with Swagger UI. Where the service asks for a token, the page asks its user, and
// keeps it as the console does: in this tab alone, and only in a header.

const KEY = "select-service-token";
const form = document.getElementById("ask");

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage may be forbidden
  }
}

let token = stored();
const bearer = () => (token ? { authorization: `Bearer ${token}` } : {});

async function show() {
  const answer = await fetch("openapi.json", { headers: bearer() });
  form.hidden = answer.ok;
  if (!answer.ok) {
    document.getElementById("refused").textContent = token ? (await answer.json()).error : "";
    return;
  }
  globalThis.SwaggerUIBundle({
    spec: await answer.json(),
    dom_id: "#api",
    deepLinking: true,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    validatorUrl: null, // asks nobody else
    requestInterceptor: (request) => {
      Object.assign(request.headers, bearer());
      return request;
    },
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  token = document.getElementById("token").value.trim();
  try {
    sessionStorage.setItem(KEY, token);
  } catch {
    // then it holds until the page is closed
  }
  show();
});
const dark = matchMedia("(prefers-color-scheme: dark)");
const shade = () => document.documentElement.classList.toggle("dark-mode", dark.matches); // of Swagger UI
dark.addEventListener("change", shade);
shade();
document.addEventListener("DOMContentLoaded", show);
